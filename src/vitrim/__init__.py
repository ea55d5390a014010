"""vitrim"""
