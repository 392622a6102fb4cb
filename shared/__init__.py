"""What both sides of the wire share; numpy only, never torch or transformers."""
