"""What a trained model is worth: validation loss and samples of its text."""
