package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// latencies are how long messages took, each of them, while many workers were at work.
type latencies []time.Duration

// quantile is in milliseconds.
func (l latencies) quantile(q float64) float64 {
	return l[min(int(q*float64(len(l))), len(l)-1)].Seconds() * 1000
}

// measure opens the variant and lets workers process messages for the window, and longer while something beside them is
// at work: that begins when all are warm, and its context ends with the window.
func measureLatencies(ctx context.Context, v variant, p *place, workers int, newID func() string, window time.Duration, beside func(context.Context) error) (latencies, error) {
	c, err := v.open(ctx, p.url, workers)
	if err != nil {
		return nil, err
	}
	defer c.close()
	for range warmUp * workers {
		if err := processFirst(ctx, c, p, newMessage(newID())); err != nil {
			return nil, err
		}
	}
	var (
		mutex sync.Mutex
		all   latencies
		over  = make(chan struct{})
	)
	group, ctx := errgroup.WithContext(ctx)
	for range workers {
		group.Go(func() error {
			var own latencies
			for {
				select {
				case <-over:
					mutex.Lock()
					defer mutex.Unlock()
					all = append(all, own...)
					return nil
				default:
				}
				began := time.Now()
				if err := processFirst(ctx, c, p, newMessage(newID())); err != nil {
					return err
				}
				own = append(own, time.Since(began))
			}
		})
	}
	group.Go(func() error {
		defer close(over)
		limited, cancel := context.WithTimeout(ctx, window)
		defer cancel()
		err := beside(limited)
		<-limited.Done()
		return err
	})
	if err := group.Wait(); err != nil {
		return nil, err
	}
	slices.Sort(all)
	return all, nil
}
