"""What passes through which layer while a model trains: tokens left out (random-LTD), layers left out."""
