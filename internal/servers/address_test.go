//go:build unix

package servers

import "testing"

func TestParseAddress(t *testing.T) {
	tests := []struct {
		kind     Kind
		address  string
		hostPort string // empty: refused
	}{
		{KindPostgreSQL, "postgres://u:p@db.example:6000/x?sslmode=disable", "db.example:6000"},
		{KindPostgreSQL, "postgresql://u@[::1]/x", "[::1]:5432"},
		{KindPostgreSQL, "postgres:///x?host=/run/postgresql", "127.0.0.1:5432"},
		{KindPostgreSQL, "host=localhost user=u", ""},
		{KindPostgreSQL, "amqp://guest:guest@localhost/", ""},
		{KindPostgreSQL, "postgres://u:%zz@db/x", ""},
		{KindRabbitMQ, "amqp://guest:guest@broker.example/", "broker.example:5672"},
		{KindRabbitMQ, "amqps://u:p@broker.example:5671/vhost", "broker.example:5671"},
		{KindRabbitMQ, "localhost:5672", ""},
		{KindRabbitMQ, "http://localhost:15672", ""},
	}
	for _, test := range tests {
		u, err := parseAddress(test.kind, test.address)
		if test.hostPort == "" {
			if err == nil {
				t.Errorf("parseAddress(%s, %q): no error", test.kind, test.address)
			}
			continue
		}
		if err != nil {
			t.Errorf("parseAddress(%s, %q): %v", test.kind, test.address, err)
		} else if got := hostPort(test.kind, u); got != test.hostPort {
			t.Errorf("hostPort(%q) = %q, want %q", test.address, got, test.hostPort)
		}
	}
}

func TestParseKind(t *testing.T) {
	for _, kind := range kinds {
		if got, err := ParseKind(string(kind)); got != kind || err != nil {
			t.Errorf("ParseKind(%q) = %q, %v", string(kind), got, err)
		}
	}
	if _, err := ParseKind("redis"); err == nil {
		t.Error("no error for a kind that does not exist")
	}
}
