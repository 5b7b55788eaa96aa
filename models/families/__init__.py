"""One file a family, holding what its config means and nothing that families share."""
