"""What every floor of the house may speak about: errors, configuration, requests and step plans. No tensors."""
