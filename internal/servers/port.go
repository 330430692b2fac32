//go:build unix

package servers

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken from below the range that systems give to outgoing
// connections. From inside it, a client that dials a server which is down for a
// restart could be given the server's port as its own, connect to itself and
// keep the server from coming back.
const (
	firstPort = 20000
	lastPort  = 32000
)

// freePorts returns n different ports on which nobody listens.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range 200 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		listener, err := net.Listen("tcp4", loopback(port))
		if err != nil {
			continue
		}
		// Held until all are found, so that they differ.
		defer listener.Close()
		if ports = append(ports, port); len(ports) == n {
			return ports, nil
		}
	}
	return nil, errors.New("servers: no free port on 127.0.0.1")
}

// loopback is the TCP address of a local port.
func loopback(port int) string {
	return joinPort("127.0.0.1", strconv.Itoa(port))
}

func joinPort(host, port string) string {
	return net.JoinHostPort(host, port)
}
