package main

import (
	"context"
	"fmt"
)

const rabbitMQ = "rabbitmq"

// addRabbitMQ compares the fused inbox with a plain transaction behind a queue, end to end.
func (b *bench) addRabbitMQ(ctx context.Context) error {
	for _, network := range networks {
		s := &section{name: rabbitMQ + "/" + network, title: "RabbitMQ, one queue, one consumer, until it is empty; to the database " + networkTitles[network]}
		for _, inFlight := range b.options.workers {
			g, err := b.rabbitMQGroup(ctx, network, inFlight)
			if err != nil {
				return err
			}
			s.groups = append(s.groups, g)
		}
		b.add(s)
	}
	return nil
}

func (b *bench) rabbitMQGroup(ctx context.Context, network string, inFlight int) (*group, error) {
	g := &group{setting: fmt.Sprintf("%d in flight", inFlight)}
	drain := &drain{inFlight: inFlight}
	var baseline *subject
	for _, v := range []variant{plainPQ, inboxsqlFused} {
		p, err := b.placeOf(ctx, v)
		if err != nil {
			return nil, err
		}
		url, err := b.through(network, p)
		if err != nil {
			return nil, err
		}
		s := &subject{name: v.name, baseline: baseline, rate: func(ctx context.Context) (float64, error) {
			return drain.rate(ctx, b.broker, v, url, p)
		}}
		if baseline == nil {
			baseline = s
		}
		g.subjects = append(g.subjects, s)
	}
	// So many messages that a drain takes about two slices: a try tells.
	g.before = func(ctx context.Context) error {
		if drain.messages > 0 {
			return nil
		}
		drain.messages = 20 * inFlight
		rate, err := baseline.rate(ctx)
		drain.messages = max(drain.messages, int(2*rate*b.options.slice.Seconds()))
		return err
	}
	return g, nil
}
