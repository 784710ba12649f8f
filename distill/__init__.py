"""What is learned: the elastic draft, losses, layer initialisation, vocabulary trimming, the gate."""
