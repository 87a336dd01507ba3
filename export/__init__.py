"""How is a quantized model written down, and read back?"""
