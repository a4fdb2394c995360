"""Other programs with stored KV in them, one file each; what they need is installed with an extra."""
