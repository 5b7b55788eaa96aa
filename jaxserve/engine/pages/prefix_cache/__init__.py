"""Prefix caches, which share the pages of computed tokens with later sequences that begin with the same tokens: one interface, two implementations."""
