"""Other people's formats, one file each: what of a capsule goes where, in bytes that depend on the capsule alone."""
