"""From a Program to files: `huggingface` (config.json and the modeling file of the adapted checkpoint), `module` (the
sharded runtime module), `files` (weights, copied files, the directory), ONNX, the manifest and the model card.

The two kinds of code are printed with `node_code` (a node as an expression), `statements` (a graph as lines) and
`python_source` (text).
"""
