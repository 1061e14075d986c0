"""The kopf operator: reconciles InferencePool objects."""
