package main

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// countTrips counts the round trips of a message on the wire.
func (b *bench) countTrips(ctx context.Context) error {
	for _, kind := range []string{first, duplicate} {
		for _, v := range variants {
			if !b.isMeasured(kind, v.name) {
				continue
			}
			trips, err := b.countTripsOf(ctx, kind, v)
			if err != nil {
				return fmt.Errorf("round trips of %s: %w", v.name, err)
			}
			b.trips[kind+"/"+v.name] = trips
		}
	}
	return nil
}

func (b *bench) isMeasured(kind, name string) bool {
	for _, network := range networks {
		for _, workers := range b.options.workers {
			if b.subject(kind+"/"+network, workersSetting(workers), name) != nil {
				return true
			}
		}
	}
	return false
}

func (b *bench) countTripsOf(ctx context.Context, kind string, v variant) (float64, error) {
	p, err := b.placeOf(ctx, v)
	if err != nil {
		return 0, err
	}
	url, err := b.through(delayed, p)
	if err != nil {
		return 0, err
	}
	c, err := v.open(ctx, url, 1)
	if err != nil {
		return 0, err
	}
	defer c.close()

	const messages = 10
	var msg *message.Message
	one := func() error {
		if kind == duplicate && v.claims && msg != nil {
			return process(ctx, c, message.NewMessage(msg.UUID, msg.Payload))
		}
		msg = newMessage(randomIDs.next())
		return processFirst(ctx, c, p, msg)
	}
	var before int64
	for n := range warmUp + messages {
		if n == warmUp {
			before = b.network.trips.Load()
		}
		if err := one(); err != nil {
			return 0, err
		}
	}
	return float64(b.network.trips.Load()-before) / messages, nil
}
