"""What two models differ in: passes, layers, generated code, tensors; on the terminal, as JSON, as one HTML page."""
