"""One file a model family: how its config and its tensor names map to the decoder."""
