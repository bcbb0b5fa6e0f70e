"""A Flower app with FedAvg and a train function of its own."""
