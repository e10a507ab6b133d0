"""Emit: a Program to files. One file per target; nothing here writes to disk but the output directory and ONNX.

The Hugging Face side: `huggingface` (config and kinds of layers), `modeling_file` (the file), `layers` (each layer's
statements), `per_rank_modules` and `per_rank_tokens` (which modules compute per rank), `verbatim` (code that is taken
as it stands). The runtime side: `runtime_module`, `runtime_layers`, `classes`, `outline`, `roles`. Both print with
`node_code` (a node as an expression), `statements` (a graph as lines) and `python_source` (text).
"""
