"""What the forward files of this folder share."""
