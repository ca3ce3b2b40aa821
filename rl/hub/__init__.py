"""Files in the hub's format: the names of tensors, and safetensors files read and written a piece at a time."""
