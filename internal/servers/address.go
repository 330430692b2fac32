//go:build unix

package servers

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Kind names one of the servers that this package can provide.
type Kind string

// The servers that this package can provide.
const (
	KindPostgreSQL Kind = "postgres"
	KindRabbitMQ   Kind = "rabbitmq"
)

// Variables that hold the address of a server to use as it is. [Set.Environ]
// sets the same ones.
const (
	PostgreSQLVariable = "WATERMILL_TEST_POSTGRES_URL"
	RabbitMQVariable   = "WATERMILL_TEST_AMQP_URI"
)

// kinds is every kind in the order in which they are listed to people.
var kinds = []Kind{KindPostgreSQL, KindRabbitMQ}

// ParseKind returns the kind with that name.
func ParseKind(name string) (Kind, error) {
	if kind := Kind(name); slices.Contains(kinds, kind) {
		return kind, nil
	}
	return "", fmt.Errorf("servers: no server is called %q, only %q and %q", name, string(KindPostgreSQL), string(KindRabbitMQ))
}

// String returns the server's own name.
func (k Kind) String() string {
	if k == KindRabbitMQ {
		return "RabbitMQ"
	}
	return "PostgreSQL"
}

// Variable is the environment variable with the address of such a server.
func (k Kind) Variable() string {
	if k == KindRabbitMQ {
		return RabbitMQVariable
	}
	return PostgreSQLVariable
}

// schemes are the URL schemes that the clients of such a server accept.
func (k Kind) schemes() []string {
	if k == KindRabbitMQ {
		return []string{"amqp", "amqps"}
	}
	return []string{"postgres", "postgresql"}
}

// parseAddress checks the address that the kind's variable holds. Errors do not
// repeat the address: it may hold a password.
func parseAddress(kind Kind, address string) (*url.URL, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("servers: %s is not a URL", kind.Variable())
	}
	if !slices.Contains(kind.schemes(), u.Scheme) {
		return nil, fmt.Errorf("servers: %s must be a URL that begins with %s://", kind.Variable(), strings.Join(kind.schemes(), ":// or "))
	}
	return u, nil
}

// hostPort is the TCP address of a URL, with the kind's standard port when the
// URL names none.
func hostPort(kind Kind, u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "5432"
		if kind == KindRabbitMQ {
			port = "5672"
		}
	}
	host := u.Hostname()
	if host == "" {
		host = "127.0.0.1"
	}
	return joinPort(host, port)
}
