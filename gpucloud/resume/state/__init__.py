"""What a checkpoint holds of a training script."""
