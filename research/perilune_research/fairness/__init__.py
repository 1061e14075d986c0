"""What a tenant that sends far more than its share costs another one."""
