"""What numbers of a study say: arithmetic alone, tested on made-up curves whose answer is known."""
