"""Programs that use the package from outside."""
