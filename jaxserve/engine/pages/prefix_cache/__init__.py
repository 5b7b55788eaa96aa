"""Keys and values of finished prompts that later prompts begin with: one interface, two implementations."""
