package servers

import "syscall"

// setParentDeath has the kernel send the signal to the program when the thread
// that started it ends.
func setParentDeath(attributes *syscall.SysProcAttr, signal syscall.Signal) {
	attributes.Pdeathsig = signal
}
