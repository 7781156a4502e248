"""Sample with inference engines behind one protocol: token ids in, token ids with logprobs out."""
