"""What a release consists of, and how its parts are made: `python -m release`."""
