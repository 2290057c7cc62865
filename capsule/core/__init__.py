"""Pure rules: values in, values out. No input or output, no clock, no randomness; imports stdlib, pydantic, rfc8785."""
