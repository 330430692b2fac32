//go:build unix

package servers

import (
	"context"
	"errors"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

// Server is a server that a [Set] provides.
type Server struct {
	Kind    Kind
	Address string // a URL, as the kind's clients understand it
	Origin  Origin
	Version string // empty when the server tells it only after a log-in
	stop    func() error
}

// String describes the server without what is secret in its address.
func (s Server) String() string {
	address := s.Address
	if u, err := url.Parse(address); err == nil {
		address = u.Host
	}
	return strings.Join(strings.Fields(s.Kind.String()+" "+s.Version), " ") + ": " + string(s.Origin) + ", " + address
}

// Set is the servers that [Ensure] provides.
type Set struct {
	Servers []Server
}

// Ensure provides a server of each kind, or one of every kind when none is
// named, in the order that the package comment lists. The context bounds the
// start only: who gets a Set has to close it.
func Ensure(ctx context.Context, wanted ...Kind) (*Set, error) {
	wanted, err := normalize(wanted)
	if err != nil {
		return nil, err
	}
	origins, err := plan(ctx, thisMachine(), wanted)
	if err != nil {
		return nil, err
	}
	if err := install(ctx, kindsFrom(origins, OriginInstalled)); err != nil {
		return nil, err
	}

	set := &Set{Servers: make([]Server, len(wanted))}
	failures := make([]error, len(wanted))
	var group sync.WaitGroup
	for i, kind := range wanted {
		group.Add(1)
		go func() {
			defer group.Done()
			set.Servers[i], failures[i] = provide(ctx, kind, origins[kind])
		}()
	}
	group.Wait()
	if err := errors.Join(failures...); err != nil {
		return nil, errors.Join(err, set.Close())
	}
	return set, nil
}

// provide gets one server ready.
func provide(ctx context.Context, kind Kind, origin Origin) (Server, error) {
	server := Server{Kind: kind, Origin: origin}
	switch {
	case origin == OriginGiven:
		server.Address = os.Getenv(kind.Variable())
		server.Version = askVersion(ctx, kind, server.Address)
	case origin == OriginDocker:
		container, err := startContainer(ctx, kind)
		if err != nil {
			return Server{}, err
		}
		server.Address, server.stop = container.address(), container.Stop
		server.Version = askVersion(ctx, kind, server.Address)
	case kind == KindPostgreSQL:
		private, err := StartPostgreSQL(ctx)
		if err != nil {
			return Server{}, err
		}
		server.Address, server.Version, server.stop = private.URL(), private.Version(), private.Stop
	case kind == KindRabbitMQ:
		private, err := StartRabbitMQ(ctx)
		if err != nil {
			return Server{}, err
		}
		server.Address, server.Version, server.stop = private.URI(), private.Version(), private.Stop
	}
	return server, nil
}

// Environ is the variables with the addresses, each as "NAME=value".
func (s *Set) Environ() []string {
	var environ []string
	for _, server := range s.Servers {
		environ = append(environ, server.Kind.Variable()+"="+server.Address)
	}
	return environ
}

// Close stops the servers that were started, at the same time, and leaves the
// others alone.
func (s *Set) Close() error {
	failures := make([]error, len(s.Servers))
	var group sync.WaitGroup
	for i, server := range s.Servers {
		if server.stop == nil {
			continue
		}
		group.Add(1)
		go func() {
			defer group.Done()
			failures[i] = server.stop()
		}()
	}
	group.Wait()
	return errors.Join(failures...)
}

// askVersion asks a server at an address for its version. It is for people to
// read, so a server that does not tell strangers is no error.
func askVersion(ctx context.Context, kind Kind, address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	var version string
	if kind == KindRabbitMQ {
		version, _ = greetRabbitMQ(ctx, hostPort(kind, u))
	} else {
		version, _ = greetPostgreSQL(ctx, hostPort(kind, u), u.User.Username(), strings.TrimPrefix(u.Path, "/"))
	}
	return version
}

// kindsFrom are the kinds that have that origin.
func kindsFrom(origins map[Kind]Origin, origin Origin) []Kind {
	var from []Kind
	for _, kind := range kinds {
		if origins[kind] == origin {
			from = append(from, kind)
		}
	}
	return from
}
