"""pi0, pi0.5 and SmolVLA: a vision-language model whose keys and values a flow-matching action expert attends to."""
