"""State updates of feedbacks, alone and fused with quantization."""
