"""`python -m keras_ccp`, the command where its script is not on the path."""

from keras_ccp.app.cli import main

if __name__ == "__main__":
    main()
