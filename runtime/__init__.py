"""How do tokens come out?"""
