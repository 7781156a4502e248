from ludic.cli.main import main

main()
