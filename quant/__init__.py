"""How do the weights become few bits?"""
