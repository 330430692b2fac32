package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"time"
)

// bench is one run: what is measured, and on what.
type bench struct {
	options  options
	address  string // PostgreSQL's
	admin    *sql.DB
	network  *network
	broker   *broker
	places   []*place
	sections []*section
	trips    map[string]float64 // round trips per message, by section and variant
}

func newBench(ctx context.Context, options options) (*bench, error) {
	address, err := variable("WATERMILL_TEST_POSTGRES_URL")
	if err != nil {
		return nil, err
	}
	uri, err := variable("WATERMILL_TEST_AMQP_URI")
	if err != nil {
		return nil, err
	}
	parsed, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	if parsed.Port() == "" {
		parsed.Host += ":5432"
	}
	b := &bench{options: options, address: address, trips: map[string]float64{}}
	if b.admin, err = sql.Open("postgres", address); err != nil {
		return nil, err
	}
	if b.network, err = newNetwork(parsed.Host); err != nil {
		return nil, err
	}
	if b.broker, err = newBroker(uri); err != nil {
		return nil, err
	}
	if err := b.prepare(ctx); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

func variable(name string) (string, error) {
	value := os.Getenv(name)
	if value == "" {
		return "", fmt.Errorf("%s is not set; run make bench, which starts the servers", name)
	}
	return value, nil
}

// prepare makes the sections, with only what is asked for.
func (b *bench) prepare(ctx context.Context) error {
	for _, add := range []func(context.Context) error{b.addMessages, b.addGrowth, b.addRabbitMQ, b.addRetention, b.addPartitioned, b.addRetirement} {
		if err := add(ctx); err != nil {
			return err
		}
	}
	if len(b.sections) == 0 {
		return errors.New("nothing matches -only")
	}
	return nil
}

// placeOf is the variant's, wherever it is measured.
func (b *bench) placeOf(ctx context.Context, v variant) (*place, error) {
	for _, p := range b.places {
		if p.name == v.name {
			return p, nil
		}
	}
	return b.addPlace(ctx, v.name, v.claims)
}

func (b *bench) addPlace(ctx context.Context, name string, claims bool) (*place, error) {
	p, err := newPlace(ctx, b.admin, name, b.address, claims)
	if p != nil {
		b.places = append(b.places, p)
	}
	return p, err
}

// run measures everything in every round, so that what changes on the machine in the meantime changes for all.
func (b *bench) run(ctx context.Context, progress io.Writer) error {
	if err := b.countTrips(ctx); err != nil {
		return err
	}
	for round := range b.options.rounds {
		started := time.Now()
		for _, section := range b.sections {
			for _, group := range section.groups {
				if err := group.measure(ctx); err != nil {
					return fmt.Errorf("%s, %s: %w", section.title, group.setting, err)
				}
			}
		}
		fmt.Fprintf(progress, "bench: round %d of %d took %.1f s\n", round+1, b.options.rounds, time.Since(started).Seconds())
	}
	return b.verify(ctx)
}

// verify fails when a variant has not done what it was measured for.
func (b *bench) verify(ctx context.Context) error {
	for _, p := range b.places {
		if err := p.verify(ctx, b.admin); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// close removes what the run has left on the servers.
func (b *bench) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var failures []error
	for _, p := range b.places {
		failures = append(failures, p.drop(ctx, b.admin))
	}
	return errors.Join(append(failures, b.admin.Close(), b.network.close(), b.broker.close())...)
}
