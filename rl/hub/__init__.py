"""Files as on the Hugging Face hub: the names of tensors, and safetensors read and written a piece at a time."""
