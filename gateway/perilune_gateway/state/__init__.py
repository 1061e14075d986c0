"""What the gateway knows: plain classes, one event loop, no locks; time is an argument."""
