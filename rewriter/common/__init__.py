"""Ground of every room: errors, files, YAML with lines, processes, texts and tables, settings of configs."""
