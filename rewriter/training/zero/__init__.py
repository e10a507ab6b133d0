"""ZeRO: stages 1 and 2 on plain modules; and on FSDP2, over nodes with slow links between them."""
