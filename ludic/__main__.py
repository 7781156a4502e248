from ludic.app import main

main()
