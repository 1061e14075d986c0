"""What all commands share: how they read arguments, what they print, and how they end."""
