"""The gateway's state: plain classes that one event loop uses without locks. Time is an argument."""
