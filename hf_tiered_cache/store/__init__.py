"""What is on disk: segment files, their catalogue, quota and integrity. Knows no policy and no model."""
