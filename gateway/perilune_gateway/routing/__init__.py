"""Decides where each request goes, and follows it to its end. Start reading at router.py."""
