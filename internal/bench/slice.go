package main

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"
)

// slice is one measurement of a variant: for so long, by so many workers on as many connections.
type slice struct {
	workers  int
	measured time.Duration
	newID    func() string
	copies   bool // of messages that have been processed
}

// warmUp is what each worker processes at least before it is measured, so that all connections are there
// and drivers have prepared what they prepare.
const warmUp = 5

// rate opens the variant, warms it up and returns how many messages it processes per second.
func (s slice) rate(ctx context.Context, v variant, url string, p *place) (float64, error) {
	c, err := v.open(ctx, url, s.workers)
	if err != nil {
		return 0, err
	}
	defer c.close()
	runtime.GC() // of what others have left

	rates := make([]float64, s.workers)
	group, ctx := errgroup.WithContext(ctx)
	for i := range rates {
		group.Go(func() (err error) {
			rates[i], err = s.work(ctx, c, p)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	var sum float64
	for _, rate := range rates {
		sum += rate
	}
	return sum, nil
}

// work is a worker's part. It is measured in whole messages, by its own clock, while the others are at work.
func (s slice) work(ctx context.Context, c *consumer, p *place) (float64, error) {
	var known []*message.Message
	first := func(int) error {
		msg := newMessage(s.newID())
		if s.copies {
			known = append(known, msg)
		}
		return processFirst(ctx, c, p, msg)
	}
	again := func(n int) error {
		msg := known[n%len(known)]
		return process(ctx, c, message.NewMessage(msg.UUID, msg.Payload))
	}

	for started, n := time.Now(), 0; n < warmUp || time.Since(started) < s.measured/4; n++ {
		if err := first(n); err != nil {
			return 0, err
		}
	}
	next := first
	if s.copies {
		next = again
		for n := range warmUp {
			if err := next(n); err != nil {
				return 0, err
			}
		}
	}
	started := time.Now()
	for n := 0; ; n++ {
		if err := next(n); err != nil {
			return 0, err
		}
		if elapsed := time.Since(started); elapsed >= s.measured {
			return float64(n+1) / elapsed.Seconds(), nil
		}
	}
}

func newMessage(id string) *message.Message {
	return message.NewMessage(id, strconv.AppendInt(nil, rand.Int64N(accounts)+1, 10))
}

// processFirst processes a message that has not been processed.
func processFirst(ctx context.Context, c *consumer, p *place, msg *message.Message) error {
	if err := process(ctx, c, msg); err != nil {
		return err
	}
	p.processed.Add(1)
	return nil
}

// process gives the message a context of its own, as subscribers do.
func process(ctx context.Context, c *consumer, msg *message.Message) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	msg.SetContext(ctx)
	return c.handle(msg)
}
