"""From a Program to files: the Hugging Face side, the runtime module, ONNX, the manifest and the model card.

The Hugging Face side: `huggingface` (config and kinds of layers), `modeling_file` (the file), `layers` (each layer's
statements), `per_rank_modules` and `per_rank_tokens` (which modules compute per rank), `verbatim` (code that is taken
as it stands). The runtime side: `runtime_module`, `runtime_layers`, `classes`, `outline`, `roles`. Both print with
`node_code` (a node as an expression), `statements` (a graph as lines) and `python_source` (text).
"""
