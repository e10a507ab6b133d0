"""From a Program to files: the Hugging Face side, the runtime module, ONNX, the manifest and the model card."""
