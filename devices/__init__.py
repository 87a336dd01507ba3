"""What machine is this, and what fits?"""
