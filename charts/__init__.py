"""What the chart's generated files are made of; `make generate` writes them."""
