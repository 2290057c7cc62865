"""The capsule's bytes: layout, container, record tables. Knows nothing of the machine it runs on."""
